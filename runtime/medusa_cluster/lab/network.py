"""The cables and the switch of a laboratory, made by `ip` and `tc` of iproute2."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from medusa_runtime.errors import LabError, MissingPackageError

from . import kernel
from .link import Link

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
# One sender is limited by its own shaper, so that it feels a slow link and not a switch that drops. The switch's
# holds back what several nodes send to one at the same time.
_PORT_SHARE = 1.02
# Where iptables looks at what a bridge passes on, a tenth of a hop's CPU time goes there. No switch does that.
_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"


def find_tools() -> dict[str, str]:
    """The paths of the programs that are needed. Raises MissingPackageError with what to install."""
    found = {}
    for name, package in _TOOLS.items():
        path = shutil.which(name) or shutil.which(name, path=_PATH)
        if not path:
            raise MissingPackageError(f"medusa cluster lab needs the program {name}: apt-get install {package}")
        found[name] = path
    return found


class Network:
    """A switch, whose namespace process ``switch`` holds, and nodes that are plugged into it."""

    def __init__(self, switch: int, address: str) -> None:
        self._tools = find_tools()
        self._switch = switch
        self._ip(switch, "link set lo up", "link add br0 type bridge", "link set br0 up", f"addr add {address} dev br0")
        with open("/proc/thread-self/ns/net") as here:
            kernel.enter(switch, kernel.NEWNET)
            try:
                with suppress(OSError), open(_FILTER, "w") as setting:  # only this namespace's
                    setting.write("0")
            finally:
                kernel.enter_namespace(here.fileno())

    def plug(self, name: str, pid: int, address: str, link: Link | None) -> None:
        """Give the node whose namespace ``pid`` holds an interface eth0, with a shaper in each direction."""
        port = _port(name)
        self._ip(
            self._switch, f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master br0 up"
        )
        self._ip(pid, "link set lo up", f"addr add {address} dev eth0", "link set eth0 up")
        if link:
            self._tc(pid, f"qdisc add dev eth0 {link.shaper()}")
            self._tc(self._switch, f"qdisc add dev {port} {link.shaper(_PORT_SHARE)}")

    def unplug(self, name: str) -> None:
        """Take the node's cable away. The kernel does so when the node's namespace ends, but some time later."""
        self._ip(self._switch, f"link del {_port(name)}")

    def cut(self, name: str) -> None:
        """Pull the node's cable: what it sends and what is sent to it is lost."""
        self._ip(self._switch, f"link set {_port(name)} down")

    def restore(self, name: str) -> None:
        self._ip(self._switch, f"link set {_port(name)} up")

    def _ip(self, pid: int, *lines: str) -> None:
        self._run(pid, "ip", lines)

    def _tc(self, pid: int, *lines: str) -> None:
        self._run(pid, "tc", lines)

    def _run(self, pid: int, tool: str, lines: Sequence[str]) -> None:
        # Only the network of the other process: pids in the lines are those that we see.
        command = [self._tools["nsenter"], f"--net=/proc/{pid}/ns/net", self._tools[tool], "-batch", "-"]
        ran = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
        if ran.returncode:
            reason = " ".join(ran.stderr.split()) or f"status {ran.returncode}"
            raise LabError(f"the laboratory's network cannot be made: {tool} {'; '.join(lines)}: {reason}")


def _port(name: str) -> str:
    """The switch's end of the node's cable; the kernel takes 15 characters."""
    return f"p-{name}"
