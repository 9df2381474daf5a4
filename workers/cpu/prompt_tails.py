"""Computes a prompt once per group on CPU, also the tokens behind its last full block.

vLLM shares full blocks of 32 tokens between the samples of a group. The rest of the prompt, its tail, lies in a block to
which each sample writes its own tokens. So one sample computes it, the others wait for a step, take a copy of the block,
and compute only the last token of the prompt, because they need its logits.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import AttentionSpec

Prompt = tuple[str | int | None, ...]  # its salt, see `token_prompt`, and its tokens


@dataclass
class BlockCopies(KVConnectorMetadata):
    """What the worker copies in a step: by group of layers, the numbers of blocks."""

    sources: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    targets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class PromptTails(KVConnectorBase_V1, SupportsHMA):
    """What vLLM calls a connector. It makes two: its scheduler's plans copies, its worker's copies."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self.block_size = vllm_config.cache_config.block_size
        self.layers_of_group = [group.layer_names for group in groups]
        # A state that is not per token, such as Mamba's, already has all tokens of the prompt in it.
        self.per_token = all(
            isinstance(g.kv_cache_spec, AttentionSpec) and g.kv_cache_spec.block_size == self.block_size for g in groups
        )
        self.requests_of: dict[Prompt, dict[str, bool]] = defaultdict(dict)  # True: it has computed its prompt
        self.prompt_of: dict[str, Prompt] = {}
        self.have_waited: set[str] = set()  # once is enough: the first sample may end with its first token
        self.copies = BlockCopies()

    # --- the scheduler's ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens a copy saves. None: the request waits until another has computed them."""
        self.forget(request.request_id)  # it waits, so it has no blocks, or has them no longer
        tail = (request.num_prompt_tokens - 1) % self.block_size
        if not tail or request.num_output_tokens or not self.per_token:
            return 0, False
        if num_computed_tokens + tail == request.num_prompt_tokens - 1:  # all full blocks are shared
            if self.blocks_to_copy(request):
                return tail, False
            if self.requests_of.get(prompt_of(request)) and request.request_id not in self.have_waited:
                self.have_waited.add(request.request_id)
                return None, False
        self.remember(request)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        targets = self.last_blocks(blocks.get_block_ids(), request.num_prompt_tokens)
        for group, (source, target) in enumerate(zip(self.blocks_to_copy(request), targets, strict=True)):
            self.copies.sources[group].append(source)
            self.copies.targets[group].append(target)
        self.remember(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for name in scheduler_output.num_scheduled_tokens:
            if prompt := self.prompt_of.get(name):
                self.requests_of[prompt][name] = True  # before the copies of the next step
        copies, self.copies = self.copies, BlockCopies()
        return copies

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.forget(request.request_id)
        self.have_waited.discard(request.request_id)
        return False, None

    def blocks_to_copy(self, request: Any) -> list[int]:
        """Returns the blocks, one of each group of layers, of a request that has computed this prompt. Empty: none has."""
        assert self._kv_cache_manager is not None
        for name, computed in self.requests_of.get(prompt_of(request), {}).items():
            if computed and (ids := self._kv_cache_manager.get_block_ids(name)):
                blocks = self.last_blocks(ids, request.num_prompt_tokens)
                if all(blocks):  # 0: a sliding window has left it
                    return blocks
        return []

    def last_blocks(self, ids: tuple[list[int], ...], prompt_tokens: int) -> list[int]:
        """Returns the block of each group that holds the prompt's last token."""
        last = (prompt_tokens - 1) // self.block_size
        return [of_group[last] if last < len(of_group) else 0 for of_group in ids]

    def remember(self, request: Any) -> None:
        self.prompt_of[request.request_id] = prompt = prompt_of(request)
        self.requests_of[prompt][request.request_id] = False

    def forget(self, name: str) -> None:
        if prompt := self.prompt_of.pop(name, None):
            del self.requests_of[prompt][name]
            if not self.requests_of[prompt]:
                del self.requests_of[prompt]

    # --- the worker's ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, BlockCopies)
        for group, sources in copies.sources.items():
            for layer in self.layers_of_group[group]:
                self.caches[layer][copies.targets[group]] = self.caches[layer][sources]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all is copied before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: copies are made from the cache itself."""

    def wait_for_save(self) -> None:
        """Does nothing, as `save_kv_layer`."""


def prompt_of(request: Any) -> Prompt:
    return (request.cache_salt, *request.prompt_token_ids)
