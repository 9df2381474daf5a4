"""With in-flight updates, no request begins with what older weights have computed.

vLLM shares the blocks of equal prompts between requests of the same salt. Here the salt changes with the weights, and a
request takes it when it is scheduled: since it was asked for, the weights may have changed.
"""

from typing import Any


def build_scheduler(vllm_config: Any, **parts: Any) -> Any:
    """Returns vLLM's own scheduler with such a salt. vLLM calls it as its `scheduler_cls`."""
    scheduler = vllms_scheduler(vllm_config, parts)
    salt_prefixes(scheduler)
    return scheduler


def vllms_scheduler(vllm_config: Any, parts: dict[str, Any]) -> Any:
    """Builds what vLLM would have built, had it not been given a `scheduler_cls`."""
    vllm_config.scheduler_config.scheduler_cls = None
    return vllm_config.scheduler_config.get_scheduler_cls()(vllm_config=vllm_config, **parts)


def salt_prefixes(scheduler: Any) -> None:
    """Patch: each pause, in which weights may change, begins a new salt."""
    manager, salt = scheduler.kv_cache_manager, 0
    set_pause_state, get_computed_blocks = scheduler.set_pause_state, manager.get_computed_blocks

    def begin_salt(state: Any) -> None:
        nonlocal salt
        salt += 1
        set_pause_state(state)

    def get_computed_blocks_of_salt(request: Any) -> Any:
        if request.cache_salt != str(salt):
            request.cache_salt, request.block_hashes = str(salt), []
            request.update_block_hashes()
        return get_computed_blocks(request)

    scheduler.set_pause_state, manager.get_computed_blocks = begin_salt, get_computed_blocks_of_salt
