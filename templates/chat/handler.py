"""A chat function: {"messages": […]} in, the answer's text out as server-sent events."""

from medusa_handler import HttpError

SYSTEM = {"role": "system", "content": "You answer in one or two friendly sentences."}


class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        messages = request.object.get("messages")
        if not messages or not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise HttpError(400, 'expected {"messages": [{"role": "user", "content": "…"}]}')
        return self.model.stream_chat([SYSTEM, *messages], max_tokens=request.object.get("max_tokens", 128))
