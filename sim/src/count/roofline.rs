//! Roofline diagrams as SVG: attainable throughput by operations per byte of memory.

use std::fmt::Write as _;

use crate::gpu::Gpu;

/// A kernel in the diagram.
#[derive(Clone, Debug)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// Operations of its matrix products.
    pub flops: f64,
    /// Bytes of the memory lines that it touched.
    pub bytes: f64,
    /// Busy time of its busiest unit in microseconds.
    pub least_us: f64,
    /// Modelled time in microseconds.
    pub modelled_us: Option<f64>,
}

const WIDTH: f64 = 840.0;
/// Height of the axes with their names. Below them each kernel has a line of text, `LINE` high.
const HEIGHT: f64 = 480.0;
const LINE: f64 = 18.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;
const COLOURS: [&str; 6] = [
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf",
];

/// Logarithmic axes.
struct Axes {
    x: [f64; 2],
    y: [f64; 2],
}

impl Axes {
    fn x(&self, value: f64) -> f64 {
        LEFT + share(value, self.x) * (WIDTH - LEFT - RIGHT)
    }
    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - share(value, self.y) * (HEIGHT - TOP - BOTTOM)
    }
}

fn share(value: f64, [low, high]: [f64; 2]) -> f64 {
    ((value.log10() - low) / (high - low)).clamp(0.0, 1.0)
}

/// Draws the diagram. Kernels without matrix products are listed below it.
pub fn svg(gpu: &Gpu, points: &[Point]) -> String {
    let (drawn, left_out): (Vec<&Point>, Vec<&Point>) =
        points.iter().partition(|p| p.flops > 0.0 && p.bytes > 0.0);
    let peak = gpu.bf16() / 1e12;
    let reached = |p: &Point, us: f64| p.flops / us / 1e6;
    let intensity = |p: &Point| p.flops / p.bytes;
    let mut x = [0.0, 4.0];
    let mut y = [0.0, peak.log10().ceil()];
    for p in &drawn {
        x[0] = intensity(p).log10().floor().min(x[0]);
        x[1] = intensity(p).log10().ceil().max(x[1]);
        for us in [Some(p.least_us), p.modelled_us].into_iter().flatten() {
            y[0] = reached(p, us).log10().floor().min(y[0]);
        }
    }
    let axes = Axes { x, y };
    let lines = drawn.len() + usize::from(!left_out.is_empty());
    let height = HEIGHT + LINE * (lines + 1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(
        &mut out,
        [LEFT, 20.0],
        "start",
        &format!(
            "{}: {peak:.0} TFLOP/s bf16, {:.1} TB/s",
            gpu.name,
            gpu.hbm / 1e12
        ),
    );
    let legend = match drawn.iter().any(|p| p.modelled_us.is_some()) {
        true => "filled: modelled; hollow: at most, by the busiest unit (counted, nothing waits)",
        false => "at most, by the busiest unit (counted, nothing waits)",
    };
    text(&mut out, [LEFT, 38.0], "start", legend);
    grid(&mut out, &axes);
    roof(&mut out, &axes, gpu, peak);
    for (i, p) in drawn.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let at = |us: f64| [axes.x(intensity(p)), axes.y(reached(p, us))];
        let [px, py] = at(p.least_us);
        let _ = writeln!(
            out,
            "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"5\" fill=\"white\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
        let mut label = format!("{} {:.0} TFLOP/s", p.name, reached(p, p.least_us));
        if let Some(us) = p.modelled_us {
            let [mx, my] = at(us);
            let _ = writeln!(
                out,
                "<path d=\"M{px:.1} {:.1}L{mx:.1} {:.1}\" stroke=\"{colour}\" stroke-dasharray=\"3 3\"/>\n\
                 <circle cx=\"{mx:.1}\" cy=\"{my:.1}\" r=\"5\" fill=\"{colour}\"/>",
                py + 5.0,
                my - 5.0
            );
            let _ = write!(label, ", modelled {:.0}", reached(p, us));
        }
        let line = HEIGHT + LINE * (i + 1) as f64;
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{colour}\"/>",
            LEFT + 5.0,
            line - 4.0
        );
        text(&mut out, [LEFT + 18.0, line], "start", &label);
    }
    if !left_out.is_empty() {
        let names: Vec<&str> = left_out.iter().map(|p| p.name.as_str()).collect();
        let line = format!("no matrix products: {}", names.join(", "));
        text(
            &mut out,
            [LEFT, HEIGHT + LINE * lines as f64],
            "start",
            &line,
        );
    }
    out += "</svg>\n";
    out
}

fn grid(out: &mut String, axes: &Axes) {
    let decades = |[low, high]: [f64; 2]| (low as i32..=high as i32).map(|e| 10f64.powi(e));
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for v in decades(axes.x) {
        let x = axes.x(v);
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#dddddd\"/>"
        );
        text(out, [x, bottom + 18.0], "middle", &v.to_string());
    }
    for v in decades(axes.y) {
        let y = axes.y(v);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#dddddd\"/>"
        );
        text(out, [LEFT - 8.0, y + 4.0], "end", &v.to_string());
    }
    text(
        out,
        [(LEFT + right) / 2.0, HEIGHT - 14.0],
        "middle",
        "operations of matrix products per byte of memory lines",
    );
    let middle = (TOP + bottom) / 2.0;
    let _ = writeln!(
        out,
        "<text transform=\"translate(18 {middle}) rotate(-90)\" text-anchor=\"middle\">TFLOP/s</text>"
    );
}

/// Draws the roof: the memory's bandwidth up to the peak of the matrix units.
fn roof(out: &mut String, axes: &Axes, gpu: &Gpu, peak: f64) {
    let per_byte = gpu.hbm / 1e12;
    let corner = peak / per_byte;
    let low = 10f64.powf(axes.x[0]).max(10f64.powf(axes.y[0]) / per_byte);
    let _ = writeln!(
        out,
        "<path d=\"M{:.1} {:.1}L{:.1} {:.1}H{:.1}\" fill=\"none\" stroke=\"#444444\" stroke-width=\"2\"/>",
        axes.x(low),
        axes.y(low * per_byte),
        axes.x(corner),
        axes.y(peak),
        WIDTH - RIGHT
    );
}

fn text(out: &mut String, [x, y]: [f64; 2], anchor: &str, text: &str) {
    let escaped = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" paint-order=\"stroke\" stroke=\"white\" \
         stroke-width=\"3\">{escaped}</text>"
    );
}
