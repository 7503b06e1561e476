"""How one model trains on several processes. The model and the adapters know nothing of it.

    mesh         the processes along every axis (data, sharding, pipeline, tensor), over fleet's groups
    gloo         what Paddle's groups lack on the CPU;  stores: where each group meets;  patience: waiting longer
    ranks        what the trainer asks: sums of numbers and gradients, the norm, wholes to write
    (trainer/process_group.py)
    tensor       cuts a model by its family's plan, with hooks on the cut layers;  vocabulary: embedding, head and loss
    sequence     between the cut layers each tensor rank has a part of the positions
    pipeline     each stage has some layers, and sends on what they make;  schedule;  stages: whose is what
    loading      each rank reads its own slices
    collectives  the sums that gradients pass
    sharding     optimizer state, gradients and values by owners;  loans: layer by layer;  buckets
    whole        tensors of all processes made whole one at a time, while the main process writes them
    saved_shards   models that PaddleNLP saved as one file a rank

`trainer/build.py` fixes the order: mesh, model, adapter, tensor plan, trainer. What a process holds of a parameter
stands
at the parameter itself: `parameter.cut` (plan.py) for a part, which Paddle's own mark `is_distributed` goes with;
`needs_tp_reduce` for a whole whose gradient has to be summed over the tensor ranks; `stages` for the pipeline's
stages that
hold it, `is_elsewhere` where this one does not and knows its shape alone. Readers and writers of files follow
`cut`, so that every layout reads and writes the same files.
"""
