class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        body = request.json
        if "messages" in body:
            return {"answer": self.model.chat(body["messages"], max_tokens=2)}
        if body.get("stream"):
            return self.model.stream(body["prompt"], max_tokens=body["max_tokens"])
        return {"answer": self.model.generate(body["prompt"], max_tokens=body["max_tokens"], temperature=0)}
