"""A small HTTP proxy: CONNECT tunnels and absolute-form GETs, all to one port of loopback, each logged on stdout.

`python small_proxy.py PORT [AUTHORIZATION]` prints its own port first. What it is asked to reach need not exist, so a
test sees that names are left to the proxy.
"""

from __future__ import annotations

import socket
import sys
import threading


def serve(target: int, authorization: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            threading.Thread(target=handle, args=(client, target, authorization), daemon=True).start()


def handle(client: socket.socket, target: int, authorization: str) -> None:
    with client:
        while head := receive(client):
            line, _, rest = head.partition(b"\r\n")
            print(line.decode(), flush=True)
            if authorization and f"\r\nProxy-Authorization: {authorization}\r\n".encode() not in head:
                client.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
                continue
            method, url, version = line.split()
            with socket.create_connection(("127.0.0.1", target)) as origin:
                if method == b"CONNECT":
                    client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                    back = threading.Thread(target=copy, args=(origin, client), daemon=True)
                    back.start()
                    copy(client, origin)
                    back.join()
                    return
                path = b"/" + url.partition(b"://")[2].partition(b"/")[2]
                fields = [
                    each for each in rest.split(b"\r\n") if not each.lower().startswith((b"proxy-", b"connection"))
                ]
                origin.sendall(b" ".join((method, path, version)) + b"\r\nConnection: close\r\n" + b"\r\n".join(fields))
                copy(origin, client)
                return


def receive(client: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = client.recv(65536)
        if not data:
            return b""
        head += data
    return head


def copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
