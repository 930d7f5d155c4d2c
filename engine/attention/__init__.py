"""Attention backends behind one interface: write K/V by slot mapping, then attend by block table."""
