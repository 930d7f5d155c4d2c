"""Inputs and outputs of a batch: rows of many formats in, each row once out, in files that are whole or not there."""
