"""Errors of the real engine on the page: no GPU, or one that is too small."""

from pathlib import Path
from typing import Any

from browser.chromium import CHROMIUM, FLAGS
from browser.person import ControlledSite, visiting
from helpers.store import add_model
from helpers.tiny import KINDS, Tiny, tiny_gguf

HUGE = Tiny(pattern="ff", heads=8, kv_heads=(1, 8), head_dims=(16, 256), context=32768)

# The software GPU allocates any amount: this limits each device to 300 MiB.
SMALL_GPU = """
const { createBuffer, popErrorScope } = GPUDevice.prototype;
GPUDevice.prototype.createBuffer = function (descriptor) {
  this.allocated = (this.allocated ?? 0) + descriptor.size;
  const fits = this.allocated < 300 * 2 ** 20;
  return createBuffer.call(this, fits ? descriptor : { ...descriptor, size: 16 });
};
GPUDevice.prototype.popErrorScope = async function () {
  const error = await popErrorScope.call(this);
  return this.allocated < 300 * 2 ** 20 ? error : new GPUOutOfMemoryError("it is full");
};
"""

LOAD_AS_A_MODULE = """async () => {
  const { load } = await import("/webgemma.js");
  return load().catch(({ kind, message }) => [kind, message]);
}"""


def test_a_browser_without_webgpu_is_reported(chromium: Any, tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if "webgpu" not in flag]
    browser = chromium.browser_type.launch(executable_path=CHROMIUM, args=flags)
    context = browser.new_context()
    context.route("**/wheel/*", lambda _: None)  # never answered: it is said before Python starts
    with visiting(context, ControlledSite(tmp_path)) as person:
        person.page.goto(person.url)
        assert person.notice().startswith("This browser offers no GPU: use a browser with WebGPU")
        assert person.notice().endswith(" and open the page over https or from localhost.")
        person.button("Load the model again").wait_for()
        assert person.button("Send").is_disabled()
        assert person.page.get_by_text("Traceback").count() == 0
        kind, message = person.page.evaluate(LOAD_AS_A_MODULE)
        assert kind == "no-webgpu"
        assert message.startswith("This browser offers no GPU: use a browser with WebGPU")
    browser.close()


def test_a_model_that_is_too_large_suggests_those_that_fit(chromium: Any, tmp_path: Path) -> None:
    add_model(tmp_path, "small:tiny", gguf=tiny_gguf(KINDS["small"]))
    add_model(tmp_path, "huge:tiny", gguf=tiny_gguf(HUGE))
    site = ControlledSite(tmp_path, {"replay.js": SMALL_GPU})
    context = chromium.new_context()
    with visiting(context, site) as person:
        person.open()
        person.open_models()
        person.page.locator("#ollama .model", has_text="too large for this GPU").click()
        person.page.locator("#notice-text", has_text="would fit").wait_for()
        message = person.notice()
        assert message.startswith("huge:tiny needs 0.00")
        assert message.endswith("These would fit: small:tiny, Bundled model.")
        person.button("Choose a model").click()
        person.choose("stored", "Bundled model")
    context.close()
