"""A kernel that lists a parameter too few."""

from tiny_kernels import Scale

KERNELS = (Scale(512),)
KERNELS[0].parameters = KERNELS[0].parameters[:-1]
