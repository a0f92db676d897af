"""What an instance does without the engine process of its node's agent."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, cast

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.node.attachment import Attachment
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline


def test_an_instance_without_room_for_a_connection_starts_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("medusa_runtime.node.attachment.channel_pair", full)
    timeline, reports = Timeline.create("test"), ReportPipe()
    attachment = Attachment(cast(Any, object()), "/no/socket", Settings(model="m"), timeline)
    with socket.socket() as listener:
        assert not attachment.take_engine(listener, timeline, reports)
    assert [stage.detail for stage in timeline.stages()] == [{"reason": "[Errno 24] Too many open files"}]
    reports.close()
    timeline.close()
