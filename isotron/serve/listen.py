"""Where a server listens: its sockets, bound before anything is loaded, so that a port in use costs no time."""

from __future__ import annotations

import socket

from isotron.core.errors import refuse


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, all at one port (0: a free one), not yet listening.

    Addresses that this machine cannot bind are left out; refused where none can be bound.
    """
    found: list[socket.socket] = []
    try:
        places = {info[4]: info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise refuse(f"--host {host}", f"it is no address: {error}", "--host 127.0.0.1") from error
    why = ""
    for place, family in places.items():
        here = found[0].getsockname()[1] if found else port
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((place[0], here, *place[2:]))
        except OSError as error:
            sock.close()
            why = why or error.strerror or str(error)
            continue
        found.append(sock)
    if not found:
        raise refuse(f"--host {host} --port {port}", f"the system says: {why}", "--host 127.0.0.1 --port 0, a free one")
    return found
