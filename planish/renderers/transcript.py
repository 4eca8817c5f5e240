"""One conversation as a chat template writes it, divided into turns."""

from collections.abc import Sequence

from planish.renderers.chat_format import Turn
from planish.renderers.codec import Control, Piece
from planish.renderers.messages import CheckedMessage
from planish.renderers.template_markup import ChatTemplate, Rendering
from planish.renderers.template_outputs import RejectedError, TemplateOutputs
from planish.renderers.template_traits import TemplateTraits, common_prefix

_REWRITTEN = (
    "the chat template writes other text before this answer than in the prompt that sampling would "
    "use; train the answer in an example of its own (build_supervised_examples, or "
    "train_on_what=last_assistant_message)"
)
_NO_REASONING = (
    "the prompt begins a block of reasoning, and the message has none; add reasoning_content"
)
_REASONING_LEFT_OUT = "the chat template leaves out its reasoning; remove the reasoning"
_NO_END = "the chat template writes no end token after this answer"
_IN_PARTS = "the chat template writes this answer as several messages, of which a sample is one"
_NO_GENERATION = "the chat template has no generation block around this answer"
_NO_PLACE = "its text is empty, or the chat template writes it into another message"


class Transcript:
    """A conversation, divided into turns at the places where a chat template writes its texts."""

    def __init__(
        self, template: ChatTemplate, traits: TemplateTraits, messages: Sequence[CheckedMessage]
    ) -> None:
        """Raises ValueError if the template cannot write one of the messages."""
        self.traits = traits
        self._outputs = TemplateOutputs(template, traits, messages)
        self.messages = self._outputs.messages

    def prompt_turns(self) -> list[Turn]:
        """Return the turns of the prompt for the next answer. The last turn is its header."""
        return self._prompt_turns(len(self.messages), is_example=False)

    def example_turns(self) -> list[Turn]:
        """Return the turns of a training example.

        The prompt of the last answer precedes it, also if the template writes other text there once
        the answer follows.
        """
        count = len(self.messages)
        rendering = self._outputs.up_to(count, prompt=False)
        end = rendering.end_of_markup(len(rendering.code))
        if self.messages[-1].role != "assistant":
            end = min(end, self._shared_with_prompt(rendering))
            turns, at = self._split(rendering, count, end, is_example=True)
            return [*turns, Turn(rendering.pieces(at, end), (), None)] if at < end else turns
        before = self._prompt_code(count - 1)
        if before is None or rendering.code.startswith(before):
            return self._split(rendering, count, end, is_example=True)[0]
        *turns, header = self._prompt_turns(count - 1, is_example=True)
        places = rendering.places.items()
        at = max((spans[0][1] for number, spans in places if number < 2 * count - 2), default=0)
        start = self._answer_start(rendering, count - 1, at, end, follows_located=False)
        stop, reason = self._answer_end(rendering, count - 1, (start, end, end))
        output = rendering.pieces(start, stop)
        if self.traits.opens_thought:
            lead, missing = self._reasoning_left_out(rendering)
            output, reason = (*lead, *output), missing or reason
        last = Turn(header.header, output, count - 1, sampled=True, untrainable_reason=reason)
        return [*turns, last]

    def _prompt_turns(self, count: int, is_example: bool) -> list[Turn]:
        rendering = self._outputs.up_to(count, prompt=True)
        turns, at = self._split(rendering, count, len(rendering.code), is_example)
        header = (*rendering.pieces(at), *self.traits.missing_prompt)
        return [*turns, Turn(header, (), None, sampled=True)]

    def extends(self, answer: int, count: int) -> bool:
        """Return whether the prompt after `count` messages begins with the prompt of the message
        `answer` and that message.
        """
        before = self._prompt_code(answer)
        upto, after = self._outputs.up_to(answer + 1, False), self._outputs.up_to(count, True)
        if before is None or not upto.code.startswith(before):
            return False
        stop = upto.next_control(len(before), self.traits.stops)
        end = upto.end_of_markup(len(upto.code)) if stop is None else stop
        # Some templates end the last answer with another stop token than the answers before it.
        return after.code.startswith(upto.code[:end]) and after.control_at(end) in self.traits.stops

    def _shared_with_prompt(self, rendering: Rendering) -> int:
        """Return the end of the last message: white space, or an end of sequence, that the next
        header does not follow is no part of it.
        """
        try:
            prompt = self._outputs.up_to(len(self.messages), prompt=True)
        except RejectedError:
            return len(rendering.code)
        shared = rendering.end_of_markup(common_prefix(rendering.code, prompt.code))
        return max([shared, *(end for spans in rendering.places.values() for _, end in spans)])

    def _prompt_code(self, count: int) -> str | None:
        """Return the code of the prompt after `count` messages, or None if there is none."""
        if not any(message.is_given for message in self.messages[:count]):
            return None
        try:
            rendering = self._outputs.up_to(count, prompt=True)
        except RejectedError:
            return None
        return rendering.code + rendering.code_of(self.traits.missing_prompt)

    def _split(
        self, rendering: Rendering, count: int, end: int, is_example: bool
    ) -> tuple[list[Turn], int]:
        """Divide the output for `count` messages, before `end`, into turns. Return them and the end
        of the last one.
        """
        turns: list[Turn] = []
        at = 0
        follows_located = False
        for index in range(count):
            limit = self._next_start(rendering, index, end)
            if self.messages[index].role == "assistant":
                start = self._answer_start(rendering, index, at, limit, follows_located)
                turn, at = self._answer_turn(rendering, index, (at, start, limit, end), is_example)
                follows_located = True
            else:
                turn, at, follows_located = self._other_turn(rendering, index, at, limit)
            turns.append(turn)
        return turns, at

    def _next_start(self, rendering: Rendering, index: int, end: int) -> int:
        """Return where the text of a later message begins; `end` if there is none."""
        starts = (
            rendering.places[number][0][0]
            for later in range(index + 1, len(self.messages))
            for number in (2 * later, 2 * later + 1)
            if number in rendering.places
        )
        return min(starts, default=end)

    def _other_turn(
        self, rendering: Rendering, index: int, at: int, limit: int
    ) -> tuple[Turn, int, bool]:
        message = self.messages[index]
        ending = self.traits.role_ends.get(message.role)
        places = [place for place in rendering.places.get(2 * index, ()) if place[0] >= at]
        if ending is None or not places or places[0][0] > limit:
            return Turn((), (), index, untrainable_reason=_NO_PLACE), at, False
        start, stop = places[0]
        leading = message.text[: len(message.text) - len(message.text.lstrip())]
        trailing = message.text[len(message.text.rstrip()) :]
        before = rendering.code[at:start]
        if before[len(before.rstrip()) :] == self.traits.role_leads[message.role] + leading:
            start -= len(leading)
        stop += len(trailing) if rendering.code.startswith(trailing, stop) else 0
        end_code = rendering.code_of(ending)
        # More text of the template may follow in the message, such as the tools.
        end = rendering.code.find(end_code, stop, limit)
        if end >= 0:
            stop = end + len(end_code)
        else:
            stop += common_prefix(rendering.code[stop:limit], end_code)
            if rendering.control_at(stop - 1) is None and rendering.control_at(stop) is None:
                return Turn((), (), index, untrainable_reason=_NO_PLACE), at, False
        return Turn(rendering.pieces(at, start), rendering.pieces(start, stop), index), stop, True

    def _answer_start(
        self, rendering: Rendering, index: int, at: int, limit: int, follows_located: bool
    ) -> int:
        """Return the end of an answer's header, as far as it can be told from the output."""
        own = min((start for start, _ in self._spans(rendering, index)), default=limit)
        head = rendering.code_of(self.traits.head).lstrip()
        position = rendering.code.find(head, at, own) if head else -1
        if position < 0:
            if follows_located:
                return at
            controls = [at]
            while (control := rendering.next_control(controls[-1])) is not None and control < own:
                controls.append(control + 1)
            return controls[-1]
        position += len(head)
        opening = rendering.code_of(self.traits.opening)
        return position + len(opening) * rendering.code.startswith(opening, position)

    def _answer_turn(
        self, rendering: Rendering, index: int, bounds: tuple[int, int, int, int], is_example: bool
    ) -> tuple[Turn, int]:
        at, start, limit, end = bounds
        rewritten: str | None = None
        if is_example:
            before = self._prompt_code(index)
            if before is not None and rendering.code.startswith(before) and len(before) >= at:
                start = len(before)
            else:
                rewritten = _REWRITTEN
        stop, reason = self._answer_end(rendering, index, (start, limit, end))
        if is_example and rendering.generations:
            blocks = rendering.generations
            block = next((one for one in blocks if start < one[1] and one[0] < stop), None)
            reason = reason or (None if block else _NO_GENERATION)
            start, stop = (max(start, block[0]), min(stop, block[1])) if block else (start, stop)
        header, output = rendering.pieces(at, start), rendering.pieces(start, stop)
        turn = Turn(header, output, index, sampled=True, untrainable_reason=rewritten or reason)
        return turn, stop

    def _answer_end(
        self, rendering: Rendering, index: int, bounds: tuple[int, int, int]
    ) -> tuple[int, str | None]:
        """Return the end of an answer that starts at the first of `bounds`, and why it cannot be
        trained, or None if it can. The text of the next message begins at the second of `bounds`,
        and the output ends at the third.
        """
        start, limit, end = bounds
        spans = self._spans(rendering, index)
        control = rendering.next_control(start, self.traits.ends)
        is_last = index == len(self.messages) - 1
        reason: str | None = None
        if control is not None and control < max(limit, start + 1):
            stop = control + 1
        elif is_last:
            stop = end
            reason = None if self.traits.stops_in_next_header else _NO_END
        else:
            stop = max([start, *(place_end for _, place_end in spans)])
            reason = _NO_END
        if any(place_end > stop for _, place_end in spans):
            reason = _IN_PARTS
        thinking = (self.messages[index].thinking or "").strip()
        is_written = 2 * index + 1 in rendering.places or self.traits.opens_thought
        if is_last and thinking and not is_written:
            reason = _REASONING_LEFT_OUT
        return stop, reason

    def _spans(self, rendering: Rendering, index: int) -> list[tuple[int, int]]:
        """Return the places of the text and the reasoning of a message."""
        numbers = (2 * index, 2 * index + 1)
        return [rendering.places[number][0] for number in numbers if number in rendering.places]

    def _reasoning_left_out(self, rendering: Rendering) -> tuple[tuple[Piece, ...], str | None]:
        """Return the pieces of the last answer's reasoning as the model samples it, if the prompt
        begins a block of reasoning and the template leaves the block out, or the reason against
        training if there is no reasoning.
        """
        index = len(self.messages) - 1
        thinking = (self.messages[index].thinking or "").strip("\n")
        assert self.traits.think_tags is not None
        if 2 * index + 1 in rendering.places:
            return (), _REWRITTEN
        if not thinking:
            return (), _NO_REASONING
        return (f"{thinking}\n", Control(self.traits.think_tags[1]), "\n\n"), None
