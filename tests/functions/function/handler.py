def handle(request):
    return {"hello": request.json["name"], "method": request.method, "path": request.path, "query": request.query}


def anything(request):
    return {"method": request.method, "bytes": len(request.body)}
