"""What a run should cost, from formulas alone.

Standard library only: importing this wing never imports torch. One module a subject:

    shapes         sizes and parameters of a model (`layers` its matrices, `presets` published ones,
                   `hf_config` a config.json)
    precision      bytes per parameter, by recipe
    layout         degrees of parallelism, ZeRO, pipeline schedule
    activations    what a forward pass keeps, tensor by tensor (`blocks` its parts)
    memory         all of a rank's memory (`weights` its parameters, `zero` their shards, `stages`
                   its layers and micro-batches, `estimate` the result, `headroom` whether it fits)
    training       a model and how it is trained, with the memory that follows
    flops          operations of a pass and a step, MFU and HFU
    hardware       memory, peak rates and links of GPUs
    communication  bytes on the wire, one rule for all collectives (`collective_time` by algorithm,
                   `hierarchy` within and between nodes, `link` latency and bandwidth,
                   `message_clock` recorded messages replayed)
    book           the book's own numbers: memory charts, calculator, paired runs

    from playbook_utils.predict.memory import predict_memory
"""
