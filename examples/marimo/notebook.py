# /// script
# dependencies = ["marimo", "webgemma"]
# ///

import marimo

app = marimo.App(app_title="Gemma in this notebook")


@app.cell
def _(mo):
    mo.md("Python runs in this tab, and the model on your GPU: nothing leaves your machine.")
    return


@app.cell
async def _(Gemma, mo):
    with mo.status.spinner("Loading the model"):
        model = await Gemma.aload(str(mo.notebook_location() / "public" / "gemma.gguf"))
    model
    return (model,)


@app.cell
def _(asdict, mo, model):
    async def answer(messages, config):
        chat = [{"role": message.role, "content": message.content} for message in messages]
        settings = {name: value for name, value in asdict(config).items() if value is not None}
        async for piece in model.achat(chat, **settings):
            yield piece.text

    mo.ui.chat(
        answer,
        prompts=["What are you?", "Tell me a story about a dragon."],
        show_configuration_controls=True,
        config={"temperature": 0},
    )
    return


@app.cell
def _():
    from dataclasses import asdict

    import marimo as mo

    from webgemma import Gemma

    return Gemma, asdict, mo


if __name__ == "__main__":
    app.run()
