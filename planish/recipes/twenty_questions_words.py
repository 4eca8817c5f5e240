"""The words of twenty questions: common nouns by kind, a list made for planish.

A quarter of each kind is held out for tests. Every word has one spelling and one meaning.
"""

KINDS: dict[str, tuple[str, ...]] = {
    "animal": tuple(
        "cat dog horse cow pig sheep goat rabbit mouse lion tiger bear wolf fox elephant monkey "
        "giraffe camel "
        "eagle owl duck penguin parrot shark whale dolphin salmon frog snake turtle bee ant spider "
        "butterfly crab octopus".split()
    ),
    "food": tuple(
        "apple banana orange lemon grape strawberry peach cherry carrot potato onion tomato "
        "cabbage pumpkin "
        "bread cheese butter egg rice pasta soup pizza cake cookie chocolate honey salt pepper "
        "milk coffee".split()
    ),
    "tool": tuple(
        "hammer saw drill screwdriver pliers shovel rake axe knife spoon fork scissors needle "
        "ladder bucket broom rope nail lock key".split()
    ),
    "thing at home": tuple(
        "table chair bed lamp sofa mirror carpet curtain pillow blanket clock candle fridge oven "
        "sink toilet telephone television computer camera book pencil umbrella bottle".split()
    ),
    "vehicle": tuple(
        "car bus truck train tram bicycle motorcycle tractor boat ship submarine airplane "
        "helicopter rocket balloon ambulance".split()
    ),
    "piece of clothing": tuple(
        "shirt coat dress skirt sock shoe boot glove hat scarf belt sweater".split()
    ),
    "instrument": tuple("piano guitar violin drum flute trumpet harp accordion".split()),
    "thing in nature": tuple(
        "river lake ocean mountain island desert forest tree flower grass cloud rain snow "
        "lightning sun moon star volcano cave sand".split()
    ),
    "building": tuple(
        "house castle church school hospital bridge tower lighthouse barn windmill museum "
        "prison".split()
    ),
}


def training_words() -> list[str]:
    """Return three of every four words."""
    return [
        word for words in KINDS.values() for number, word in enumerate(words) if number % 4 != 3
    ]


def held_out_words() -> list[str]:
    """Return every fourth word of each kind."""
    return [word for words in KINDS.values() for word in words[3::4]]
