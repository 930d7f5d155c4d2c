"""Inputs of a batch: files of rows in many formats, wherever they lie, as one `Source`."""
