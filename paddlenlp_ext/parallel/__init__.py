"""Train one model on several processes: data, tensor, sequence, pipeline, expert and sharded (ZeRO) parallelism.

Models and adapters do not depend on this package. `trainer/build_model.py` creates the mesh, builds the model, adds the
adapter, and then shards both.

    16 processes = 2 replicas x 2 sharding ranks x 2 pipeline stages x 2 tensor ranks

    replica   0                                      1
              sharding 0         sharding 1          sharding 0         sharding 1
    stage 0   [ t0 | t1 ]        [ t0 | t1 ]         [ t0 | t1 ]        [ t0 | t1 ]      first layers
    stage 1   [ t0 | t1 ]        [ t0 | t1 ]         [ t0 | t1 ]        [ t0 | t1 ]      last layers

    tensor ranks   same micro-batch, slices of the same layers: all-reduce in every layer
    stages         same micro-batch, consecutive layers: hidden states are sent forward, gradients backward
    sharding       different micro-batches: gradients are summed, and each rank owns a shard of the state (ZeRO)
    replicas       different micro-batches: gradients are summed
    experts        expert groups of consecutive replicas and sharding ranks: each rank holds some of the experts, and
                   tokens are sent to the rank that holds their expert

| module | contents |
| --- | --- |
| `mesh` | rank of this process, number of ranks and communication group along every mesh axis |
| `process_group` | collectives that the trainer calls (for one process: `trainer/single_process.py`) |
| `tensor_parallel` | shards a model by the sharding plan of its model family, with hooks on the sharded layers |
| `shard_parameters` | shards one parameter or buffer |
| `vocab_parallel` | embedding, lm_head and cross entropy with a sharded vocabulary |
| `sequence_parallel` | splits hidden states along the sequence wherever tensor parallelism would replicate them |
| `pipeline/` | stages, schedule, runtime, and the cost model for balanced stages |
| `expert_parallel` | distributes the experts of each layer over replicas, with hooks that exchange hidden states |
| `zero` | sharding of optimizer state, gradients and parameters (ZeRO stages 1 to 3) |
| `collectives` | differentiable collectives, and bucketed all-reduce of gradients |
| `gloo` | collectives that Paddle lacks for gloo; rendezvous; a barrier without a timeout |
| `gloo_timeout` | waits for slow processes before each gloo collective, so that the collective does not time out |
| `load_weight_slices` | loads only the slices of the weights that a rank holds |
| `gather_weights` | gathers sharded tensors to the main process for saving |
| `merge_paddlenlp_shards` | merges models that PaddleNLP saved as one file per rank |

The `Placement` of a tensor (sharding_spec.py) records the shard that this process holds, whether this pipeline stage
holds the tensor, and the rank that owns the tensor under ZeRO. Code that reads and writes files uses the `Placement`,
so that files do not depend on the parallel degrees.
"""
