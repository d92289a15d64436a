//! A linear layer, trained by all ranks together.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use phalanx::burn::{Ddp, DdpConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = phalanx::init()?; // the ranks that the launcher started
    let device = Device::flex().autodiff();
    let model: Linear = LinearConfig::new(4, 2).init(&device);
    let mut ddp = Ddp::new(model, group.clone(), DdpConfig::default())?; // rank 0's values
    let mut optim: ModuleOptimizer = SgdConfig::new().init();
    for step in 0..10 {
        let x = Tensor::<2>::full([8, 4], step + group.rank() as i32, &device); // this rank's batch
        let loss = ddp.forward(|model| model.forward(x).square().mean())?;
        let grads = ddp.backward(loss)?; // averaged over all ranks, while backward ran
        ddp.update(|model| optim.step(1e-4, model, grads));
    }
    println!(
        "all ranks have the same parameters: {}",
        ddp.replicas_agree()?
    );
    Ok(group.shutdown()?)
}
