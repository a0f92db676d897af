import asyncio
import pathlib


class Handler:
    async def load(self, context):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()

    async def predict(self, request):
        assert asyncio.get_running_loop() is self.loop
        if request.text == "stream":
            return self.count()
        if request.text == "forever":
            pathlib.Path("began").touch()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pathlib.Path("cancelled").touch()
                raise
        await asyncio.sleep(0)
        return {"got": request.text}

    async def count(self):
        for number in range(3):
            await asyncio.sleep(0)
            yield {"number": number}
