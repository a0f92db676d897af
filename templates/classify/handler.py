"""Your own torch module as a function: {"text": "…"} in, its most likely label out."""

import json

from medusa_handler import HttpError


class Handler:
    def load(self, context):
        from network import Network, batch

        self.labels = json.loads(context.weights.file("config.json"))["labels"]
        self.batch = batch
        # No memory, no initial values: the weights of the checkpoint are the module's parameters.
        self.network = context.weights.build(lambda: Network(len(self.labels)))

    def predict(self, request):
        import torch

        text = request.object.get("text")
        if not isinstance(text, str) or not text.strip():
            raise HttpError(400, 'expected {"text": "…"}')
        with torch.inference_mode():
            (row,) = self.network(*self.batch([text])).softmax(-1).tolist()
        scores = dict(sorted(zip(self.labels, row, strict=True), key=lambda pair: -pair[1]))
        return {"label": next(iter(scores)), "scores": scores}
