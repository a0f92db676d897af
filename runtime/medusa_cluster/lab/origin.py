"""The origin of a laboratory, which serves folders over HTTP, with ranges and versions.

``python -m medusa_cluster.lab.origin ADDRESS:PORT NAME=FOLDER…`` prints a line once it listens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    from aiohttp import web

    listen, *folders = arguments
    address, _, port = listen.rpartition(":")
    application = web.Application()
    for entry in folders:
        name, _, folder = entry.partition("=")
        # Checkpoints in Hugging Face's cache are symbolic links.
        application.router.add_static(f"/{name}", folder, follow_symlinks=True, chunk_size=1 << 20)

    web.run_app(
        application,
        host=address,
        port=int(port),
        access_log=None,
        print=lambda *_: print(listen, flush=True),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
