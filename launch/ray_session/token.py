"""The token that a Ray cluster may require of its users.

It is read from RAY_AUTH_TOKEN, from the file that RAY_AUTH_TOKEN_PATH names, or from ~/.ray/auth_token.
"""

import logging

TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
TIMEOUT_S = 5.0  # for a cluster to say whether it requires a token


def use_token_if_available() -> bool:
    """Makes Ray send the token with every call from now on. Returns False if there is no token."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger(TOKEN_LOGGER).setLevel(logging.ERROR)
    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def requires_token(address: str) -> bool:
    """True if the cluster at that address refuses callers without a token."""
    import grpc
    import ray  # noqa: F401  makes its generated modules importable
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    with init_grpc_channel(address) as channel:
        try:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def explain_token_refusal(token_sent: bool) -> str:
    """The rest of a sentence about a cluster that refused our token, or that received none."""
    sources = (
        "It is taken from RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token; "
        "`ray get-auth-token` on the head node prints it."
    )
    return f"refuses this token. {sources}" if token_sent else f"demands a token, and there is none here. {sources}"
