"""The cables and the switch of a laboratory, made with iproute2's ``ip`` and ``tc``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from medusa_runtime.errors import LabError, MissingPackageError

from . import kernel
from .link_speed import LinkSpeed

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
# A single sender is limited by its own shaper, so that it sees a slow link instead of a switch that drops packets. The
# switch's shaper limits what several nodes send to one at the same time.
_PORT_SHARE = 1.02
# If iptables inspects bridged packets, that takes a tenth of a hop's CPU time. No real switch does that.
_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"


def find_tools() -> dict[str, str]:
    """Return the paths of the required programs. Raises MissingPackageError, which says what to install."""
    found = {}
    for name, package in _TOOLS.items():
        path = shutil.which(name) or shutil.which(name, path=_PATH)
        if not path:
            raise MissingPackageError(f"medusa cluster lab needs the program {name}: apt-get install {package}")
        found[name] = path
    return found


class Network:
    """A switch, in the namespace of the process ``switch``, and the nodes that are plugged into it."""

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

    def plug(self, name: str, pid: int, address: str, link: LinkSpeed | None) -> None:
        """Give a node, whose first process is ``pid``, the interface eth0, with a shaper in each direction."""
        port = _port(name)
        self._ip(
            self._switch, f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master br0 up"
        )
        self._ip(pid, "link set lo up", f"addr add {address} dev eth0", "link set eth0 up")
        if link:
            self._tc(pid, f"qdisc add dev eth0 {link.shaper()}")
            self._tc(self._switch, f"qdisc add dev {port} {link.shaper(_PORT_SHARE)}")

    def unplug(self, name: str) -> None:
        """Remove the node's cable. The kernel would do so after the end of the node's namespace, but with a delay."""
        self._ip(self._switch, f"link del {_port(name)}")

    def cut(self, name: str) -> None:
        """Pull the node's cable, so that all its packets are lost, in both directions."""
        self._ip(self._switch, f"link set {_port(name)} down")

    def restore(self, name: str) -> None:
        self._ip(self._switch, f"link set {_port(name)} up")

    def _ip(self, pid: int, *lines: str) -> None:
        self._run(pid, "ip", lines)

    def _tc(self, pid: int, *lines: str) -> None:
        self._run(pid, "tc", lines)

    def _run(self, pid: int, tool: str, lines: Sequence[str]) -> None:
        # Enter only the network namespace, so that pids in the lines are those that this process sees.
        command = [self._tools["nsenter"], f"--net=/proc/{pid}/ns/net", self._tools[tool], "-batch", "-"]
        ran = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
        if ran.returncode:
            reason = " ".join(ran.stderr.split()) or f"status {ran.returncode}"
            raise LabError(f"the laboratory's network cannot be made: {tool} {'; '.join(lines)}: {reason}")


def _port(name: str) -> str:
    """Return the name of the switch's end of a node's cable. The kernel allows 15 characters."""
    return f"p-{name}"
