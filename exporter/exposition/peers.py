"""Who is at the other end of a connection, as far as connections are counted against each other."""

import ipaddress

_PREFIX_BITS = 64
"""One host of IPv6 has that many addresses to itself."""


def peer_of(address: object) -> str:
    """One client's name: an IPv4 address, or the network of an IPv6 one; empty where there is none.

    Args:
        address: As ``socket.accept`` gives it.
    """
    if not isinstance(address, tuple) or not address:
        return ""
    text = str(address[0])
    if ":" not in text:
        return text
    try:
        found = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> _PREFIX_BITS << _PREFIX_BITS, _PREFIX_BITS)))
