"""Tests that run compiled kernels on a GPU: ``JAX_DSA_GPU=1 pytest tests/gpu -n 6``."""

import os
import pathlib

import pytest

ENABLED = os.environ.get("JAX_DSA_GPU") == "1"


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="kernels on a GPU: set JAX_DSA_GPU=1")
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents and not ENABLED:
            item.add_marker(skip)
