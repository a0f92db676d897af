from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel


class Order(BaseModel):
    item: str
    count: int = 1


@dataclass
class Point:
    x: int
    y: int


def handle(order: Order, request):
    return {"item": order.item, "count": order.count, "length": len(request.body)}


def points(points: list[Point]) -> Point:
    return Point(sum(p.x for p in points), sum(p.y for p in points))


def values(numbers: dict[str, float]):
    return numbers


def text(body: str) -> str:
    return body.upper()


def unknown(connection: complex):
    return connection
