"""Python's garbage collector, kept from walking millions of closures and registers in vain."""

from __future__ import annotations

import contextlib
import gc


@contextlib.contextmanager
def paused():
    """No collection at all: for work that makes many objects and no cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def little_to_walk():
    """What exists already, a kernel's closures above all, is left out of collections; what the work
    leaves behind is collected at the end, while that is still cheap.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
