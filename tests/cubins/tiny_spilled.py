"""A kernel with a stack frame that nobody allowed, and the same one allowed."""

from tiny_kernels import Scale

from jax_dsa.cubins import manifest

WORDS = 300
BYTES = 4 * WORDS + 64  # the compiler adds some words of its own
ALLOWED = (manifest.Spill("words", BYTES, "indexed by a run-time number, for the test"),)
KERNELS = (Scale(512, WORDS), Scale(576, WORDS, ALLOWED))
