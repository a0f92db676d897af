"""Train the network on sentences.txt, which takes seconds, and write model/, the checkpoint that is served."""

import json
import struct
from pathlib import Path

import torch
from network import Network, batch

HERE = Path(__file__).parent


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # products this small are slower on more
    lines = (HERE / "sentences.txt").read_text().splitlines()  # a label, a space, a sentence
    named, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    labels = list(dict.fromkeys(named))
    targets = [labels.index(label) for label in named]
    network, inputs = Network(len(labels)), batch(texts)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(*inputs), torch.tensor(targets))
        loss.backward()
        optimizer.step()
    folder = HERE / "model"
    folder.mkdir(exist_ok=True)
    save(network, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"labels": labels}) + "\n")
    print(f"loss {loss.item():.4f}, wrote {folder}")


def save(network, path):
    """Write a safetensors file: a header with each tensor's place, then the bytes (like the package of that name)."""
    header, data = {}, b""
    for name, tensor in network.state_dict().items():
        content = bytes(tensor.detach().contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
