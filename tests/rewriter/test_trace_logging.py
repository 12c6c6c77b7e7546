"""A reference form without a trace is a reason, not an error in the user's log."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from k3fuse.rewriter.tracing import Like, Template, trace


def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.ERROR]


def test_torch_logs_nothing_that_the_caller_catches(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers do not propagate
    # Other tests of the process may have silenced it.
    caplog.set_level(logging.ERROR, logger=logger.name)
    try:
        template = Template("product", product, ("a", "b"))
        shapes = {"a": Like((4, 8), torch.float32), "b": Like((16, 4), torch.float32)}
        with pytest.raises(RuntimeError, match="must"):
            trace(template, shapes, None, {}, "aot")
        assert errors(caplog) == []
        # Control: the same error elsewhere is logged, before and after.
        with FakeTensorMode(), pytest.raises(RuntimeError):
            product(torch.empty(4, 8), torch.empty(16, 4))
        assert "failed while attempting" in errors(caplog)[0]
    finally:
        logger.removeHandler(caplog.handler)
