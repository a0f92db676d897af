"""Named entities: {"text": "…"} in, each name with its kind and place out, by a token classifier of transformers."""

import torch
from medusa_handler import HttpError
from tokenizers import Tokenizer


class Handler:
    def load(self, context):
        self.model = context.weights.pretrained_model()  # returns at once; each part waits for its own weights
        self.tokenizer = Tokenizer.from_buffer(context.weights.file("tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.model.config.max_position_embeddings)

    def predict(self, request):
        text = request.object.get("text")
        if not isinstance(text, str) or not text.strip():
            raise HttpError(400, 'expected {"text": "…"}')
        encoded = self.tokenizer.encode(text)
        with torch.inference_mode():
            scores, labels = self.model(torch.tensor([encoded.ids])).logits[0].softmax(-1).max(-1)
        names = self.model.config.id2label
        tokens = zip(labels.tolist(), scores.tolist(), encoded.word_ids, encoded.offsets, strict=True)
        found = joined((names[label], score, word, *span) for label, score, word, span in tokens if word is not None)
        return {"entities": [entity | {"text": text[entity["start"] : entity["end"]]} for entity in found]}


def joined(tokens):
    """Return the entities that tokens (label, score, word, start, end) make up.

    B-PER begins a person, and I-PER goes on with it. The later tokens of a word belong to its first one, whatever their
    labels are. An entity's score is that of its first token.
    """
    entities, last, goes_on = [], None, False  # the word of the token before, and whether that is part of an entity
    for label, score, word, start, end in tokens:
        kind = label.removeprefix("B-").removeprefix("I-")
        if word == last or (goes_on and kind == entities[-1]["kind"] and not label.startswith("B-")):
            if goes_on:
                entities[-1]["end"] = end
        else:
            goes_on = label != "O"
            if goes_on:
                entities.append({"kind": kind, "score": score, "start": start, "end": end})
        last = word
    return entities
