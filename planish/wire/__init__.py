"""The bodies of the public SDK's protocol, in protobuf and JSON, converted to and from planish's
own types.

    bodies     decompression of request bodies, with a size limit
    messages   the protobuf messages, built from a table of their fields
    fields     reading a JSON object field by field
    tensors    TensorData and token chunks, in both encodings
    training   forward_backward, forward, optim_step
    sampling   asample
    models     create_model, save_weights, load_weights and similar requests
    records    sessions, training runs, checkpoints, samplers
    client_operations, client_frames, client_errors    the requests of planish's own client, and
        what it is told beyond the public protocol

Server and client share this package. Each function reads or writes one thing, and its inverse,
where it is needed, stands beside it. Invalid values raise a UserError that names the field. An
unknown field is rejected unless it is empty, so that an option of a later client is never ignored
silently.
"""
