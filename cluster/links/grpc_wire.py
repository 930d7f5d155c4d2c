"""What both ends of a gRPC link agree on: the method's name, the metadata field, the channel options, the address."""

from __future__ import annotations

from cluster.link import LinkAddress, LinkLimits

__all__ = ["HELLO_TIMEOUT", "LINGER", "METHOD", "SECRET_KEY", "SERVICE", "LinkAddress", "channel_options"]

SERVICE = "squadron.Link"
METHOD = "Connect"
SECRET_KEY = "squadron-secret"  # noqa: S105 - the name of a metadata field, not a secret
HELLO_TIMEOUT = 5.0  # seconds for the first message of either side
LINGER = 1.0  # seconds that a closing link gives the peer to take what was sent


def channel_options(limits: LinkLimits) -> list[tuple[str, int]]:
    """Return gRPC's options: message size, keepalive, no proxy, a connection of its own for each link."""
    return [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.keepalive_time_ms", round(1000 * limits.keepalive)),
        ("grpc.keepalive_timeout_ms", round(1000 * limits.keepalive_timeout)),
        # What counts once a ping is out; a minute unless told otherwise.
        ("grpc.http2.ping_timeout_ms", round(1000 * limits.keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
    ]
