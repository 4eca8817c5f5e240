"""What crosses the wire: the bodies of the public SDK's protocol, protobuf and JSON, to and from
planish's own types.

    bodies     compressed request bodies, opened under a cap
    messages   the protobuf messages, built from a table of their fields
    fields     reading a JSON object field by field
    tensors    TensorData and token chunks, in both encodings
    training   forward_backward, forward, optim_step
    sampling   asample
    models     create_model, save_weights, load_weights and their kin
    records    sessions, training runs, checkpoints, samplers
    client_operations, client_frames, client_errors    what planish's own client sends, and is told
        besides

Server and client share it. Each function reads or writes one thing; its inverse, where somebody
needs it, stands beside it. Whatever does not fit raises UserError that names the field; a field
that is not known is refused unless it is empty, so that an option of a later client is never
ignored in silence.
"""
