"""What the documents' `curl` lines mean, for machines that have no curl: `[-i] [-N] [-H HEADER]... [-d BODY] URL`."""

from __future__ import annotations

import argparse
import shutil
import sys
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-i", action="store_true")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d", type=str.encode)
    arguments = parser.parse_args()
    url = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
    headers = dict(header.split(": ", 1) for header in arguments.H)
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, arguments.d, headers))
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        if arguments.i:
            print(f"HTTP/1.1 {answer.status} {answer.reason}\n{answer.headers}", end="", flush=True)
        shutil.copyfileobj(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
