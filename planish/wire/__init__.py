"""The bodies of the public SDK's protocol, in protobuf and JSON, converted to and from planish's
own types.

    bodies          decompression of request bodies, with a size limit
    messages        the protobuf messages, built from a table of their fields
    fields          reading a JSON object field by field
    tensors         TensorData and token chunks, in both encodings
    training        forward_backward, forward, optim_step
    sampling        asample
    models          create_model, save_weights, load_weights and similar requests
    operations      the kind, path and body of the request for each operation, and its result
    records         checkpoints, base models, samplers
    client_frames   planish's addition to the protocol: many answers in one response
    client_errors   planish's addition to the protocol: the class of an error

Server and client share this package. Functions come in pairs that read and write the same thing,
where both are needed. Invalid values raise a UserError that names the field. An unknown field is
rejected unless it is empty, so that an option of a later client is never ignored silently.
"""
