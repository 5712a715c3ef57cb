"""Kernels in Triton: one op per module, with the name and signature of its twin in `mlaplan.reference`."""
