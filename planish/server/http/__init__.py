"""The HTTP endpoints of the SDK's protocol, the access log, and the page for Prometheus."""
