"""The network that train.py trains and handler.py serves. It recognizes the language of a text."""

import zlib

import torch
from torch import nn

BUCKETS = 2048
SIZE = 8


def features(text):
    """Return the letter triples of a text, each as the number of a bucket."""
    padded = f"  {text.lower().strip()} "
    return torch.tensor([zlib.crc32(padded[i : i + 3].encode()) % BUCKETS for i in range(len(padded) - 2)])


class Network(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.triples = nn.EmbeddingBag(BUCKETS, SIZE, mode="mean")
        self.out = nn.Linear(SIZE, labels)

    def forward(self, numbers, offsets):
        """Return scores [texts, labels] before softmax, from the bucket numbers of all texts and each text's offset."""
        return self.out(self.triples(numbers, offsets))


def batch(texts):
    found = [features(text) for text in texts]
    starts = [0]
    for numbers in found[:-1]:
        starts.append(starts[-1] + len(numbers))
    return torch.cat(found), torch.tensor(starts)
