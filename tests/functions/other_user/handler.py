"""A handler that gives up the rights of root. Later requests find the same process."""

import os
import time

os.setgid(65534)
os.setuid(65534)


def handle(request):
    time.sleep(request.json["wait_s"])
    return {"user": os.getuid(), "process": os.getpid()}
