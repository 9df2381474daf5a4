"""How weights reach the engines. One file per transport holds both ends, sender and receiver.

Once, when policy and engines have started:

    1  every rank     Sender.connection_info(buckets): which tensors there are, and where they will be found
    2  driver         hands rank 0's answer to all ranks and all engines
    3  every rank     Sender.connect(info)
       every engine   Receiver.init_info(info) → vLLM's init_weight_transfer_engine
                      ParameterMap(model, manifest): where each tensor of the policy lies in the engine

Then for each version of the weights:

    4  driver         on colocated GPUs: has all ranks free their unused memory, and waits for them (`free_memory`)
                      asks all ranks for all buckets at once: Sender.send(bucket 0), bucket 1, …
                      With `reuses_memory`, Ray makes each call when engines have loaded the bucket before
       every rank     opens the bucket (`sending.py`). The transport has it cast, checked, fingerprinted and copied
                      (`outgoing.py`)
    5  driver         gives every engine the references to the answers, without waiting for them
    6  every engine   wakes, if it slept, and takes its memory for weights
                      start_weight_update
                      for each bucket: waits until every rank has answered (`wait_for_part`),
                      Receiver.update_infos → update_weights
                      finish_weight_update, reset_prefix_cache; from now on it may sample, but holds its samples back
    7  driver         combines the ranks' fingerprints
    8  driver         when all engines have loaded: Sender.finish_send, and the memory may be reused
    9  every engine   gets the fingerprints, compares them with those of its own parameters (`verify.py`), and releases
                      its samples, or reports which tensors differ, and is replaced

What an answer of step 4 holds, such as a bucket in Ray's object store, goes from rank to engine past the driver. With
`pipeline.in_flight`, engines generate during step 4 and load afterwards, unless the transport needs both together.

The engine's side of every transport is vLLM's weight-transfer interface. `ipc` is vLLM's own backend; `vllm_backend.py`
registers ours: one for NCCL, and one that reads a mapped block of memory.
"""

from workers.sync import cuda_ipc, nccl, object_store, shared_memory
from workers.sync.transport import Message, Receiver, Sender

__all__ = ["RECEIVERS", "SENDERS", "Message", "Receiver", "Sender"]

# A row for each transport: the rank's end, and the engine's.
ENDS: dict[str, tuple[type[Sender], type[Receiver]]] = {
    "shared_memory": (shared_memory.SharedMemorySender, shared_memory.SharedMemoryReceiver),
    "object_store": (object_store.ObjectStoreSender, object_store.ObjectStoreReceiver),
    "nccl": (nccl.NcclSender, nccl.NcclReceiver),
    "cuda_ipc": (cuda_ipc.CudaIpcSender, cuda_ipc.CudaIpcReceiver),
}
SENDERS = {name: sender for name, (sender, _) in ENDS.items()}
RECEIVERS = {name: receiver for name, (_, receiver) in ENDS.items()}
