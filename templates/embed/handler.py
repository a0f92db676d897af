"""Sentence embeddings: {"input": "…" or ["…", …]} in, a vector of each text out; a dot product is the cosine."""

from medusa_handler import HttpError

MOST_TEXTS = 256


class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        given = request.object.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise HttpError(400, 'expected {"input": "text"} or {"input": ["text", …]}')
        if len(texts) > MOST_TEXTS:
            raise HttpError(413, f"expected at most {MOST_TEXTS} texts, found {len(texts)}")
        return {"embeddings": self.model.embed(texts), "model": self.model.name}
