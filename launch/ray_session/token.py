"""The token of the user that a Ray cluster may demand: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""

import logging

TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
TIMEOUT_S = 5.0  # for a cluster to say whether it demands one


def use_token_if_available() -> bool:
    """From now on Ray shows the token to whom this process asks, if there is one. Says whether there is."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger(TOKEN_LOGGER).setLevel(logging.ERROR)
    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def requires_token(address: str) -> bool:
    """Whether the cluster at that address refuses who shows none."""
    import grpc
    import ray  # noqa: F401  its generated modules are found by way of it
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    with init_grpc_channel(address) as channel:
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def explain_token_refusal(shown: bool) -> str:
    """What a cluster does that did not take the token, or had none shown."""
    ways = "It is taken from RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token; `ray get-auth-token` on the head node prints it."
    return f"refuses this token. {ways}" if shown else f"demands a token, and there is none here. {ways}"
