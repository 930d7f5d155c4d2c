"""Kernels: what runs beside the matrix products, as torch operations or compiled for this CPU."""
