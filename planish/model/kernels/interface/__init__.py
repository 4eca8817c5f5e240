"""The interface of the kernels: a Protocol for each part, and the backend that is made of parts."""
