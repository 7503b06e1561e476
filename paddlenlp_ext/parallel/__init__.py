"""Data, tensor, sequence, pipeline, expert and sharded (ZeRO) parallelism of one model over several processes.

Models and adapters do not depend on this package. `trainer/build_model.py` fixes the order: mesh, model, adapter,
shards.

    16 processes = 2 replicas x 2 sharding ranks x 2 pipeline stages x 2 tensor ranks

    replica   0                                      1
              sharding 0         sharding 1          sharding 0         sharding 1
    stage 0   [ t0 | t1 ]        [ t0 | t1 ]         [ t0 | t1 ]        [ t0 | t1 ]      first layers
    stage 1   [ t0 | t1 ]        [ t0 | t1 ]         [ t0 | t1 ]        [ t0 | t1 ]      last layers

    tensor ranks   slices of the same layers, same micro-batch: all-reduce in every layer
    stages         consecutive layers, same micro-batch: each stage passes hidden states on, and gradients back
    sharding       different micro-batches: gradients are summed, and each rank owns a share of the state (ZeRO)
    replicas       different micro-batches: gradients are summed
    experts        consecutive replicas and sharding ranks, each with some experts: tokens are sent to their experts

| module | contents |
| --- | --- |
| `mesh` | rank, size and communication group of this process along every axis |
| `process_group` | collectives of the trainer (the protocol in `trainer/process_group_protocol.py`) |
| `tensor_parallel` | shards a model by its family's plan, with hooks on the sharded layers |
| `shard_parameters` | shards one parameter or buffer |
| `vocab_parallel` | embedding, lm_head and cross entropy over sharded rows |
| `sequence_parallel` | splits the sequence between the sharded layers |
| `pipeline/` | stages, schedule, runtime, and the cost model that balances stages |
| `expert_parallel` | distributes the experts of each layer over replicas, with hooks that exchange token rows |
| `zero` | sharding of optimizer state, gradients and parameters (ZeRO stages 1 to 3) |
| `collectives` | differentiable collectives, and bucketed all-reduce of gradients |
| `gloo` | collectives that are missing from Paddle's gloo groups, rendezvous, barrier without a timeout |
| `gloo_timeout` | waits for slow processes before a gloo collective times out |
| `load_weights` | loads only the slices of the weights that a rank holds |
| `gather_weights` | gathers sharded tensors to the main process for saving |
| `merge_paddlenlp_shards` | merges models that PaddleNLP saved as one file per rank |

The `Placement` of a tensor (sharding_spec.py) records the process's shard, the pipeline stages that hold the tensor,
and its owner under ZeRO. Code that reads and writes files uses it, so that files do not depend on the layout.
"""
