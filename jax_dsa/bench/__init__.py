"""Times of forward, backward and gradient, implementations and peers side by side.

    python -m jax_dsa.bench --shape cpu --implementations xla naive naive_map [--json F] [--plot F]
    python -m jax_dsa.bench --shape v32_h64 --implementations cutedsl xla flash_mla cudnn_frontend
    python -m jax_dsa.bench --table F          # prints the table of a JSON file again

Calls of all names alternate in one process; a figure is the median over all calls, a ratio that of
medians to the first name's, with the least and the greatest ratio of a round. On a GPU times are
device time: the span of the call's kernels in the profiler's trace; elsewhere the wall time of a
call.
"""

from jax_dsa.bench.programs import SHAPES, attention, gradient, operands

__all__ = ["SHAPES", "attention", "gradient", "operands"]
