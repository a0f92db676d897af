import torch
from torch import nn


class Net(nn.Module):
    """Uses its layers in the order opposite to that of their construction, and of their names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(8))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


class Handler:
    def load(self, context):
        self.net = context.weights.build(lambda: Net().eval(), "net.")

    async def predict(self, request):
        with torch.inference_mode():
            yield {"sum": self.net(torch.full((1, 768), request.json["value"])).sum().item()}
