"""Shared by experiments: capture on fake tensors, interleaved timing, facts of the machine, tables and pictures."""
