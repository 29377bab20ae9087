"""CPU kernels in C, called through ctypes, or by torch without Python in between (`native`)."""
