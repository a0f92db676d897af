"""The creation of the controller: ``python -m medusa_cluster.controller.launch RAY_ADDRESS``.

The head's node server runs it in a process of its own, because a Ray driver has to import Ray, and because a node
server lives longer than Ray's processes. The controller stays when this process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Create the controller, and return 0 once it runs."""
    import ray

    from ..node.ray.actor import NAMESPACE
    from ..node.ray.processes import HEAD_LABEL
    from .actor import CONTROLLER_NAME, Controller

    (address,) = arguments
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    controller = (
        ray.remote(Controller)
        .options(
            name=CONTROLLER_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            label_selector={HEAD_LABEL: "true"},
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
        )
        .remote()
    )
    print("controller", ray.get(controller.pid.remote(), timeout=60))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
