import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 36, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Handler:
    def load(self, context):
        assert context.model is None
        self.net = context.weights.build(lambda: Net().eval(), "net.")

    def predict(self, request):
        with torch.inference_mode():
            return {"logits": self.net(torch.ones(1, 3, 8, 8) * request.json["value"])[0].tolist()}
