"""Anthropic's Messages API, on the same models, renderers and streams as the OpenAI endpoints.

routes         the endpoints: /v1/messages, /v1/messages/count_tokens, /v1/models
requests       the types that check requests
conversation   translates a request into one of the chat endpoint
content        reads the content blocks of messages
sampling       chooses the renderer, builds the prompt, and samples
answers        samples as content blocks and as stream events
tool_inputs    keeps the text of a tool's arguments, which clients send back as an object
errors         errors in Anthropic's form
"""
